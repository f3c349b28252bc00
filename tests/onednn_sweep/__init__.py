"""Every implementation of oneDNN that a plan can choose, on buffers of exact size between pages that cannot be accessed."""
