"""Plans whose replicas differ in speed: common cuts for all of them, and shares of the micro-batches that suit each."""
