# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The ways of computing a role, one module each, and the choice between them.

Each module has `build(problem, policy, ...)`, a traceable function of the two operands, and unless it
takes every problem, `why_not(problem, policy)`, the reason why it does not apply or None.
"""
