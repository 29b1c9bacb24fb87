set local lock_timeout = '500ms';

drop index steps_ended_idx;
