set local lock_timeout = '500ms';

drop index await_groups_unresumed_idx;
