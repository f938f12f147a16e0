# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""What `python -m jax_deconv tune` and `bench` are made of."""
