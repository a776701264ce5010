"""Small programs that forge.jit must run as eager does: in values, gradients, aliasing, mutation, modes and errors."""
