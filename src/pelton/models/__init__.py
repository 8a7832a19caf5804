"""Model families, each written once over ops."""
