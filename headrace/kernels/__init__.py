"""The operations of a device: the list (ops), the form of a weight, and their implementations."""
