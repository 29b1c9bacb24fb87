set local lock_timeout = '5s';

drop index awaits_callback_key;
