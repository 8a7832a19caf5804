"""Models of kinds that Pelton does not serve yet, written over `ops`: they hold the vocabulary open for them."""
