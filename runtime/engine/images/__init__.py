"""Images in chats: files to pixels, and their places in the prompt. Only models that take images import this."""

from .processors import read_image_processor
from .reader import ImageReader

__all__ = ["ImageReader", "read_image_processor"]
