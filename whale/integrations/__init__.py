"""Whale under the trainers of other libraries; each module needs its library."""
