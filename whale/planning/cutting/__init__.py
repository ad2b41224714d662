"""Where a model without scopes is cut into stages, by what every piece of it would take on every kind of device."""
