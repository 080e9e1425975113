"""Running the network: compiled steps, the pipeline that owns the state, and the front ends."""
