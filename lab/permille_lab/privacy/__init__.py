"""What an attacker learns of one device from the published rounds, with and without noise."""
