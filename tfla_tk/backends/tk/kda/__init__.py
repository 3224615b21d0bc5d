"""The host side of the kernels of KDA over whole sequences, of which there are none yet."""

from tfla_tk.core.support import Support

MISSING = Support(
    False, "there are no kernels of KDA's chunkwise form yet", "use backend 'triton' or 'reference'"
)
