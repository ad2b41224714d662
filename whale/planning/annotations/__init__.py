"""The user's scopes read: TaskGraphs, their devices, how they nest and which of them run together."""
