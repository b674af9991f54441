"""The stateful shell: GradScaler and ShardedGradScaler over the pure core."""
