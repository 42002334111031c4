"""Parameters that architecture specs and kernels share. This package never imports torch."""
