"""Plans for other training systems (Megatron-LM, torchtitan, DeepSpeed) and the files that start them on a cluster."""
