"""The door of Quire's own protocol: connections, frames in, frames out."""
