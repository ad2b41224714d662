"""The export: the user's code is traced by torch, and what it does beside tensors is followed or refused."""
