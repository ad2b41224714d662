"""The flat graph: made from an export, cleaned, and described as ops and parameters."""
