set local lock_timeout = '500ms';

drop index signals_early_idx;
