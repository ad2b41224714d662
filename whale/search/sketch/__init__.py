"""What a step of an arrangement roughly takes, without a plan."""
