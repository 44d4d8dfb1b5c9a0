"""What people try to call the arguments of an algorithm, and what they are called."""

INSTEAD = {
    "epsilon": "target_epsilon=8.0 for the whole run, or noise_multiplier",
    "eps": "target_epsilon=8.0 for the whole run, or noise_multiplier",
    "sigma": "noise_multiplier, the standard deviation over the clip",
    "noise": "noise_multiplier, the standard deviation over the clip",
    "clipping_norm": "clip",
    "max_grad_norm": "clip",
    "lr": "server_rate for the server; the clients' rate goes to local=Sgd(lr=…)",
}
