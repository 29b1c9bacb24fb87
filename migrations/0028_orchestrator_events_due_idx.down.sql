set local lock_timeout = '5s';

drop index orchestrator_events_due_idx;
