"""What a search ranges over: what the settings leave open, the arrangements, and the names of their devices."""
