"""Speeds of devices and links: the catalogue, cluster files, and clusters gathered from running ranks."""

from whale.hardware.catalogue import CPU, Catalogue, KnownDevice, catalogue
from whale.hardware.cluster_file import cluster_text, load_cluster, parse_cluster
from whale.hardware.clusters import DeviceProfile, make_cluster, select
from whale.hardware.precision import compute_type

__all__ = [
    "CPU", "Catalogue", "DeviceProfile", "KnownDevice", "catalogue", "cluster_text", "compute_type", "load_cluster", "make_cluster",
    "parse_cluster", "select",
]  # fmt: skip
