"""What the device keeps: the home folder, its lock, what is installed and active, what the user chose."""
