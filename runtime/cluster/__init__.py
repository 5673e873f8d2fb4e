"""Engine processes of other machines: hosts that offer them, and one core over all hosts with replay and moves."""

from .cluster import Cluster
from .greeting import read_secret
from .host import EngineHost
from .members import Members
from .remote import Credentials

__all__ = ["Cluster", "Credentials", "EngineHost", "Members", "read_secret"]
