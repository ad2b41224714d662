"""What no plan of an arrangement can beat."""
