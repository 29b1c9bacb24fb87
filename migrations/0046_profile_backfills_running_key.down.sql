set local lock_timeout = '500ms';

drop index profile_backfills_running_key;
