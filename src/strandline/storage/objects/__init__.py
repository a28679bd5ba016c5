"""Object stores: the contract, cloud stores, and a folder as a store."""
