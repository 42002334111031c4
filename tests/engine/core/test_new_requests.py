"""What the device learns of a request that enters a slot."""

from __future__ import annotations

from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.scheduler_config import SchedulerConfig


def test_new_request_has_adapter_slot_0_when_it_needs_no_adapter() -> None:
    scheduler = Scheduler(
        SchedulerConfig(num_blocks=8, block_size=4, max_model_len=16, max_num_seqs=2, max_num_batched_tokens=8)
    )
    scheduler.add_request(EngineCoreRequest(id="a", prompt_ids=[1, 2], params=SamplingParams(max_tokens=2), seed=0))
    output = scheduler.schedule()
    assert [(new.slot, new.adapter_slot) for new in output.new_requests] == [(output.scheduled_requests[0].slot, 0)]
