"""The flat graph: made of an export, cleaned, and described as ops and parameters."""
