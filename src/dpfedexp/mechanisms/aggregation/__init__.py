"""The wire protocol of two aggregators: what a client binds, seals and sends, and what the second aggregator answers."""
