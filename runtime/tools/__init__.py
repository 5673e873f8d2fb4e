"""Tools that measure an engine or a server; serving never imports them."""
