"""The network as pure functions over parameters, device state and a batch."""
