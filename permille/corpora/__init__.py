"""Reading the texts that sensitivity is measured on."""
