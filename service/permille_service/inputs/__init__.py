"""What work starts from: base models and corpora, registered and inspected."""
