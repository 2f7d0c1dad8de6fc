"""The program that keeps a device up to date without being asked."""
