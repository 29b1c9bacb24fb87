set local lock_timeout = '500ms';

drop index steps_queue_idx;
