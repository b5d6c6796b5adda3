"""Tracing: one training step of an ``nn.Module`` as a StepGraph; ``lading.capture`` is its public function."""
