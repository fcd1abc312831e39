"""Kernels for Hopper (sm_90) in Gluon: explicit TMA, asynchronous wgmma, a producer warp, two or three consumer warpgroups."""
