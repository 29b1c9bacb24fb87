set local lock_timeout = '500ms';

drop index orchestrator_events_due_idx;
