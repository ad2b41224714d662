"""Speeds of devices and links: the catalogue, cluster files, and clusters gathered from running ranks."""

from whale.hardware.catalogue import CPU, Catalogue, KnownDevice, catalogue, usual_host_link
from whale.hardware.cluster_file import cluster_text, load_cluster, parse_cluster
from whale.hardware.clusters import DeviceProfile, make_cluster, select
from whale.hardware.precision import compute_type, half_type, half_types

__all__ = [
    "CPU", "Catalogue", "DeviceProfile", "KnownDevice", "catalogue", "cluster_text", "compute_type", "half_type",
    "half_types", "load_cluster", "make_cluster",
    "parse_cluster", "select", "usual_host_link",
]  # fmt: skip
