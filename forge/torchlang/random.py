"""Random functions of torch, dropout among them."""
