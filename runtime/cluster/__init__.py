"""Engine processes of other machines: hosts that offer them, and one core over all hosts with replay and moves."""

from .cluster import Cluster
from .greeting import read_secret
from .host import EngineHost
from .members import CarriedLink, Member, Members, MemberSource
from .remote import Credentials
from .start import connected_cluster, listen_address, running_host

__all__ = [
    "CarriedLink",
    "Cluster",
    "Credentials",
    "EngineHost",
    "Member",
    "MemberSource",
    "Members",
    "connected_cluster",
    "listen_address",
    "read_secret",
    "running_host",
]
