set local lock_timeout = '500ms';

drop index awaits_callback_key;
