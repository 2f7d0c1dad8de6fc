"""State of the device: home folder, lock, installed and active models, the user's choices."""
