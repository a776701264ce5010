"""Small programs that forge.jit must run as eager does: values, gradients, aliasing, mutation, modes, RNG, exceptions."""
