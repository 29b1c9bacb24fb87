set local lock_timeout = '500ms';

drop index signals_pending_idx;
