set local lock_timeout = '500ms';

drop table api_keys;
drop table sessions;
drop table members;
