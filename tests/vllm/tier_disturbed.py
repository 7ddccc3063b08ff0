"""An extension of vLLM's workers (``worker_extension_cls``): the stores of each rank lose blocks, others in each."""

import connector_faults

connector_faults.lost_blocks()


class Disturbed:
    """Has no methods: vLLM imports this module in each worker."""
